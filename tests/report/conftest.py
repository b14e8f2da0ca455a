"""`test_browser.py` is collected where there is a browser, and always in CI, where a missing one is a failure."""

import os

from report.browser import chromium

collect_ignore = [] if chromium() or os.environ.get("CI") else ["test_browser.py"]
