"""Verifiers and judges of responses."""

from mindrlhf.errors import Unavailable as Unavailable
