"""What holds for every test process."""

from __future__ import annotations

import signal

# A shell that starts a command in the background makes it ignore SIGINT, and what it starts inherits that. The tests
# that press Ctrl-C need the ordinary disposition, whoever starts them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
