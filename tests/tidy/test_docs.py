"""The documentation: generated pages are what the code says, and every reference and link leads somewhere."""

import re
from pathlib import Path

import pytest
from docs import generate
from docs.generators import references
from docs.generators.markdown import anchors, headings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))],
)
# Where references may stand. Generated code repeats the comments of proto/.
REFERRING = ("src", "tests", "proto", "docs", "bench", "packaging")
TEXT = {".py", ".proto", ".sql", ".toml", ".md", ".service"}
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PROSE_WITHOUT_A_PAGE = re.compile(r"\b(?:Sessions|Protocol|Delivery|Gateway|Journal) page\b")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def texts() -> list[Path]:
    found = [path for folder in REFERRING for path in (ROOT / folder).rglob("*") if path.suffix in TEXT]
    return [
        path
        for path in sorted(
            [*found, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
        )
        if "gen" not in path.parts and path.is_file() and path != Path(__file__)
    ]


def test_generated_pages_are_what_the_code_says():
    wrong = [name for name, text in generate.render().items() if not _same(DOCS / name, text)]
    assert wrong == [], "run `make docs`"
    assert generate.stale() == [], "run `make docs`"


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def test_every_reference_to_a_heading_leads_to_one():
    known = {path.relative_to(DOCS).as_posix(): set(headings(path.read_text("utf-8"))) for path in DOCS.rglob("*.md")}
    wrong = [
        f'{relative(path)}: docs/{reference.page}, "{reference.heading}"'
        for path in texts()
        for reference in references.pages(path.read_text(encoding="utf-8"))
        if reference.page not in known or (reference.heading and reference.heading not in known[reference.page])
    ]
    assert wrong == []


def test_every_reference_to_a_decision_leads_to_one():
    known = {path.name[:4] for path in (DOCS / "decisions").glob("[0-9]*.md")}
    wrong = [
        f"{relative(path)}: decisions {number}"
        for path in texts()
        for number in references.records(path.read_text(encoding="utf-8"))
        if number not in known
    ]
    assert wrong == []


def test_pages_are_referred_to_by_their_names():
    wrong = [
        f"{relative(path)}: {match[0]}"
        for path in texts()
        for match in PROSE_WITHOUT_A_PAGE.finditer(references.joined(path.read_text(encoding="utf-8")))
    ]
    assert wrong == [], 'write docs/sessions.md, "Heading"'


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_somewhere(path):
    wrong = []
    for target in LINK.findall(FENCED.sub("", path.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (fragment and fragment not in anchors(file.read_text(encoding="utf-8"))):
            wrong.append(target)
    assert wrong == []


def test_every_page_is_reached_from_the_readme():
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        links = LINK.findall(page.read_text(encoding="utf-8"))
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link]
    assert [relative(page) for page in PAGES if page not in reached] == []


def test_records_are_numbered_once_and_have_their_parts():
    numbers: set[str] = set()
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        text = path.read_text(encoding="utf-8")
        assert re.match(rf"# {int(path.name[:4])}\. \S", text), f"{path.name}: the title begins with its number"
        for part in ("**Context.**", "**Decision.**", "**What would change our mind.**"):
            assert part in text, f"{path.name} lacks {part}"
        assert path.name[:4] not in numbers, f"two records are numbered {path.name[:4]}"
        numbers.add(path.name[:4])


def test_the_quickstart_shows_the_example_that_is_tested():
    example = (DOCS / "examples" / "hello.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{example}\n```" in (DOCS / "quickstart.md").read_text(encoding="utf-8")
