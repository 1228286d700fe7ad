"""The sample model, once for all pages."""

import pytest

import jackfield as jf


@pytest.fixture(scope="session")
def sample() -> jf.Model:
    """SmolLM2-135M-Instruct. Without its package this fails, with the command that brings it."""
    return jf.Model.demo()
