"""Pure protocol: one machine per save and per load. Events in, commands out; no Ray, no clock."""
