"""The web page in a headless Chromium, with real runs behind it."""
