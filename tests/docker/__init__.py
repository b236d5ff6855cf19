"""The images and the Compose file, on a container engine."""
