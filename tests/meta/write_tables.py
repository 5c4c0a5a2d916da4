"""Write the registry's table into README.md and docs/methods.md: python -m tests.meta.write_tables"""

import re
from pathlib import Path

from mva_ref.registry import table

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    for name in ("README.md", "docs/methods.md"):
        path = ROOT / name
        new = "<!-- methods -->\n" + table().replace("\\", r"\\") + "\n<!-- /methods -->"
        path.write_text(re.sub(r"<!-- methods -->\n.*?<!-- /methods -->", new, path.read_text(), flags=re.DOTALL))
