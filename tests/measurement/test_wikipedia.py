import bz2
from pathlib import Path

import pytest

from gac.core.errors import TextError
from gac.measurement import wikipedia as module

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.8/">
  <page><title>Rank</title><ns>0</ns><revision><text>
{{Infobox|rank=8}} '''Rank''' is a ''[[number (mathematics)|number]]''.&lt;ref&gt;A book.&lt;/ref&gt;
[[File:Rank.png|thumb|A [[picture]]]]
== History ==


{| class="table"
| cell
|}
* It's [http://example.org old] &amp;amp; ''known&lt;ref name="x"/&gt;.
See [[Matrix]] and [[2001: A Space Odyssey]].&lt;!-- not this --&gt;
[[Category:Numbers]] [[de:Rang]]
  </text></revision></page>
  <page><title>Old</title><ns>0</ns><redirect title="Rank" /><revision><text>#REDIRECT [[Rank]]</text></revision></page>
  <page><title>Talk:Rank</title><ns>1</ns><revision><text>No article.</text></revision></page>
  <page><title>Width</title><ns>0</ns><revision><text>A width.</text></revision></page>
</mediawiki>"""

STRIPPED = """Rank is a number.

History

* It's old & known.
See Matrix and 2001: A Space Odyssey.

A width."""


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "dump.bz2"
    path.write_bytes(bz2.compress(DUMP.encode()))
    monkeypatch.setattr(module, "_dump", lambda: path)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    return path


def test_markup_is_stripped_to_what_is_read(dump: Path) -> None:
    assert module.wiki_sample() == STRIPPED.replace("* ", "")


def test_stripped_text_is_kept(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = module.wiki_sample()
    monkeypatch.setattr(module, "_articles", lambda _: pytest.fail("stripped again"))
    assert module.wiki_sample() == first
    assert [path.suffix for path in (dump.parent / "home" / "text").iterdir()] == [".txt"]


def test_a_cache_that_cannot_be_written_costs_no_more_than_time(dump: Path, caplog: pytest.LogCaptureFixture) -> None:
    (dump.parent / "home").write_text("in the way")
    assert module.wiki_sample().startswith("Rank is a number.")
    assert "the stripped text could not be kept" in caplog.text


def test_wiki_sample_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TextError, match=r"Run pip install --no-deps gensim==4.4.0"):
        module.wiki_sample()
