"""Requests to a control plane that the test has started with the default token."""

from xtoken_services.common.files.private_files import control_token_file


def bearer() -> dict[str, str]:
    """Return the headers of a request."""
    return {"Authorization": f"Bearer {control_token_file().read_text().strip()}"}
