"""Where the time goes in rows that are slower than a rival, and what was tried: one sentence each, by row.

Keys are ``group/row`` as docs/performance.json has them. Figures are measured anew; these sentences are kept.
"""

from __future__ import annotations

from typing import Final

NOTES: Final[dict[str, str]] = {}
