"""The commit protocol: a pure state machine for each save and load, without Ray, I/O or a clock.

A machine receives events (requests of ranks, results of tasks, expired timers) and returns commands
for its executor. `coordination` has all machines of a coordinator; `save` and `load` are the
machines; `vote` decides which attempt wins a slot, `garbage` what the others leave.
"""
