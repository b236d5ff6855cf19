"""Ideas for kernels on Hopper, each measured beside the kernel that ships."""
