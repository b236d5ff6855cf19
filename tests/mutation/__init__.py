"""Mutation tests: small faults drawn by seed from a package, and whether its tests notice them."""
