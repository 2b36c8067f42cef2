"""What tests read from a page: whether it is well-formed, and the data of its charts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "img", "br")


class Balance(HTMLParser):
    """The elements that are open; each end closes the newest one."""

    def __init__(self):
        super().__init__()
        self.open, self.faults = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def well_formed(page: str) -> bool:
    """Whether every element of a page is closed in order."""
    parser = Balance()
    parser.feed(page)
    return parser.open == [] and parser.faults == []


def data_of(page: str) -> dict[str, Any]:
    """Name to data of the charts of a page."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])
