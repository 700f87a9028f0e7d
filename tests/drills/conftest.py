"""Starts whole runs as the integration tests do."""

from tests.integration.conftest import compiled_once, start

__all__ = ["compiled_once", "start"]
