"""``python -m dynmo_train``: the form in which ``launch`` starts its workers."""

from __future__ import annotations

import os

from .cli import main
from .launch.worker import end, watch_launcher

watch_launcher(os.environ)
try:
    main()
except SystemExit as ended:
    end(ended.code, os.environ)
    raise
