"""Options of decoders: what a shape has, what combines, and flags of Megatron-LM that become them."""

from __future__ import annotations

import pytest

