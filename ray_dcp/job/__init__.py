"""One commit for a whole Ray job: trainers, buffers and cursors of one moment, or nothing."""
