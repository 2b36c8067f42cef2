"""``python -m dynmo_train``: the form in which ``launch`` starts its workers."""

from __future__ import annotations

import os

from .cli import main
from .launch.worker import watch_launcher

watch_launcher(os.environ)
main()
