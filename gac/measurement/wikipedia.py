"""The text of ``wiki-sample``: English Wikipedia articles out of a packaged dump, stripped of their markup."""

import bz2
import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import iterparse

from gac.core.errors import TextError
from gac.core.io import atomic_path, home
from gac.core.progress import progress_bar
from gac.measurement.samples import packaged_file

_log = logging.getLogger("gac")
_DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_RULES = 1  # part of the cache's key: raise it when the same markup gives another text
_DROPPED_TAGS = frozenset(
    ("ref", "references", "table", "gallery", "math", "timeline", "imagemap", "source", "syntaxhighlight", "score")
)
_DROPPED_LINK = re.compile(r"\s*(file|image|category|media)\s*:", re.IGNORECASE)
_LANGUAGE_LINK = re.compile(r"[a-z]{2,3}(-[a-z-]+)?:")


def wiki_sample() -> str:
    """106 articles of the English Wikipedia, 2.9 million characters, from the dump in the package gensim.

    Parsing the markup takes seconds, so the text is kept under GAC's home. TextError if dump or parser are missing.
    """
    dump = packaged_file(_DUMP, "wiki-sample")
    digest = hashlib.sha256(dump.read_bytes()).hexdigest()
    cached = home() / "text" / f"wiki-sample-{digest[:16]}-{_RULES}.txt"
    if cached.is_file():
        return cached.read_text(encoding="utf-8")
    text = "\n\n".join(_articles(dump))
    try:
        with atomic_path(cached) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as failure:
        _log.warning("the stripped text could not be kept in %s (%s); it is made again next time", cached, failure)
    return text


def _articles(dump: Path) -> Iterator[str]:
    try:
        import mwparserfromhell
    except ImportError as failure:
        raise TextError(
            "wiki-sample needs mwparserfromhell, which is not installed",
            "the extra samples",
            "In GAC's checkout, run pip install '.[samples]'.",
        ) from failure
    for markup in progress_bar("strip wiki markup", "article", steps=list(_pages(dump)), leave=False):
        # Style tags are left for _tidy: one unpaired '' would else keep the parser from seeing what follows it.
        yield _tidy(_render(mwparserfromhell.parse(markup, skip_style_tags=True)))


def _pages(dump: Path) -> Iterator[str]:
    with bz2.open(dump) as stream:
        for _, element in iterparse(stream):
            if element.tag.rpartition("}")[2] == "page":
                markup = element.findtext("{*}revision/{*}text")
                is_article = element.findtext("{*}ns") == "0" and element.find("{*}redirect") is None
                if is_article and markup:
                    yield markup
                element.clear()


def _render(code: Any) -> str:
    return "".join(map(_render_node, code.nodes)) if code is not None else ""


def _render_node(node: Any) -> str:
    from mwparserfromhell import nodes

    match node:
        case nodes.Text():
            return str(node.value)
        case nodes.HTMLEntity():
            return str(node.normalize())
        case nodes.Heading() | nodes.ExternalLink():
            return _render(node.title)
        case nodes.Wikilink():
            title = str(node.title)
            dropped = _DROPPED_LINK.match(title) or (node.text is None and _LANGUAGE_LINK.match(title))
            return "" if dropped else _render(node.title if node.text is None else node.text)
        case nodes.Tag():
            tag = str(node.tag).strip().lower()
            return "\n" if tag == "br" else "" if tag in _DROPPED_TAGS else _render(node.contents)
    return ""  # templates, their arguments, comments


def _tidy(text: str) -> str:
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"[ \t\u00a0]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
