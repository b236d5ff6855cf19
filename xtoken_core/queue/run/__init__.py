"""The queue of a training run: blocks of positions, teacher slots and steps, granted in plan order."""
