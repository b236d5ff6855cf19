"""A teacher's output on disk: written once by a build, read by later runs instead of running the teacher. No torch."""
