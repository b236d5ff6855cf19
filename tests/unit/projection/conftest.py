"""Checks the shapes and dtypes that the annotations of the projection promise while these tests run."""

from jaxtyping import install_import_hook

install_import_hook(["xtoken_core.projection"], "beartype.beartype")
