"""The run protocol: blocks, slots and steps, granted in plan order."""
