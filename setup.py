"""Write the README as the package's description: links and pictures of the checkout become plain text."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https:)[^)]*\)\n\n", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https:)[^)]*\)")
COMMENT = re.compile(r"^<!-- .* -->\n\n?", re.MULTILINE)

description = LINK.sub(r"\1", PICTURE.sub("", COMMENT.sub("", README)))
setup(long_description=description, long_description_content_type="text/markdown")
