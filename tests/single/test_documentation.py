"""The documentation is correct: its scripts run, its commands and messages exist, and its links have targets."""

import ast
import functools
import json
import re
import shlex
import sys

import launching
import pytest
from documented import DOCS, PAGES, ROOT, fenced, kind, scripts, scripts_of
from launching import launch, mpirun

ALONE, PIPELINES = scripts_of("alone"), scripts_of("pipeline")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {
    f"test-{suite}" for suite in ("native", "single", "parallel")
}
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINKED = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


COMMAND = re.compile(
    r"(?:make|python|pytest|mpirun|horovodrun|torchrun|pip) |hvd_sparse (?:plan|--)|(?:[A-Z_]+=\S+ )*scripts/\S+\.sh"
)


def commands():
    """Return [(page, command)] of all blocks without a language, without comments and output, and of code in text."""
    more = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "benchmarks").glob("results/*.md")]
    found = []
    for page in dict.fromkeys([*PAGES, *more]):
        lines = [line.split(" #")[0].strip() for line in "".join(fenced(page, "")).splitlines()]
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
        for command in filter(COMMAND.match, dict.fromkeys(lines)):
            found.append((page.name, re.sub(r"^([A-Z_]+=\S+ )*", "", command)))
    return found


def test_every_script_is_run_somewhere():
    kinds = [kind(code) for code in scripts().values()]
    assert kinds.count("torch") >= 8 and kinds.count("tensorflow") >= 3 and kinds.count("pipeline") == 3
    assert kinds.count("ddp") == 5


@pytest.mark.parametrize("script", ALONE)
def test_scripts_without_horovod_run(script):
    exec(compile(ALONE[script], script, "exec"), {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", PIPELINES)
@pytest.mark.skipif(launching.MPIRUN is None, reason="needs mpirun")
def test_pipelines_run(script, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(PIPELINES[script])
    ranks = 4 if "hybrid(" in PIPELINES[script] else 2
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "PYTHONPATH": str(ROOT)}
    code, output = launch([*mpirun(ranks), sys.executable, str(path)], environment)
    assert code == 0, output


def sources(path, folders, found):
    """Add a script, and all that it imports from these folders, to {path: text}; return that."""
    found[path] = path.read_text()
    for node in ast.walk(ast.parse(found[path])):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        for name in names:
            for folder in folders:
                other = folder / (name.replace(".", "/") + ".py")
                if other.exists() and other not in found:
                    sources(other, folders, found)
    return found


@functools.cache
def switches(path):
    """Return the strings in a script, and in what it imports, that begin with dashes."""
    text = "".join(sources(path, [path.parent, ROOT], {}).values())
    return set(re.findall(r'"(--[a-z0-9-]+)"', text))


def test_a_switch_of_a_command_is_one_of_its_own_script():
    assert {"--method", "--quiet"} <= switches(ROOT / "examples" / "pytorch_digits.py")
    assert "--lifespans" in switches(ROOT / "benchmarks" / "lifespan.py")
    assert "--lifespans" not in switches(ROOT / "benchmarks" / "kernels.py")


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_exist(page, command):
    """Targets of make, scripts and their options, modules, tests. `train.py` is the reader's own."""
    words = shlex.split(command)
    if words[0] == "scripts/run.sh" and len(words) > 1:
        assert (ROOT / words.pop(0)).exists()
    if words[0] == "torchrun" and "--no-python" not in words:  # it starts a script without python before it
        words.insert(next(place for place, word in enumerate(words) if word.endswith(".py")), "python")
    if "hvd_sparse" in words and "python" not in words:
        place = words.index("hvd_sparse")
        is_plan = words[place + 1] == "plan"
        words[place : place + 1 + is_plan] = ["python", "-m", "hvd_sparse.plan" if is_plan else "hvd_sparse"]
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= TARGETS
    elif words[0].startswith("scripts/"):
        assert (ROOT / words[0]).exists()
    elif "pytest" in words:
        for path, _, name in (word.partition("::") for word in words if word.startswith("tests/")):
            assert re.search(rf"^def {name.partition('[')[0] or '.*'}\(", (ROOT / path).read_text(), re.MULTILINE)
    elif "python" in words:
        called = words[words.index("python") + 1 :]
        if called[:1] == ["-m"]:
            assert called[1] in ("hvd_sparse", "hvd_sparse.plan")
            path = ROOT / "hvd_sparse" / ("plan.py" if called[1].endswith("plan") else "__main__.py")
        elif called[0] == "train.py":
            return
        else:
            path = ROOT / called[0]
        assert {word.partition("=")[0] for word in called if word.startswith("--")} <= switches(path)


def messages():
    """Return what the tables of the troubleshooting page say is printed, up to the last of them."""
    page = (DOCS / "troubleshooting.md").read_text().split("## It trains, but")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def strings():
    """Return every string constant of the package, parts of f-strings too."""
    found = []
    for path in (ROOT / "hvd_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_are_those_of_the_source():
    known, listed = strings(), messages()
    assert len(listed) >= 20
    assert [message for message in listed if not any(message in one for one in known)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    wrong = []
    for target, anchor in LINKED.findall(CODE.sub("", page.read_text())):
        if not target.startswith("http"):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append(f"{target}#{anchor}")
    assert wrong == []


def anchors(page):
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_contents():
    contents = "".join(block for page in PAGES for block in TREE.findall(page.read_text()))
    listed = re.findall(r"^([a-z-]+)$", contents, re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_every_example_is_in_the_table():
    programs = [path.name for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()]
    section = (DOCS / "installation.md").read_text().partition("## Examples")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+\.py)`", " ".join(rows))) == sorted(programs)


def test_the_readme_is_short():
    assert 900 <= len((ROOT / "README.md").read_text().split()) <= 1300


@pytest.mark.exhaustive
def test_the_tutorial_runs():
    """The notebook's code as one script: both runs learn, and the sparse one sends less."""
    cells = json.loads((DOCS / "tutorial.ipynb").read_text())["cells"]
    script = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    code, output = launch([sys.executable, "-c", script], environment)  # as in a notebook, there is no file to import
    assert code == 0, output
    dense, sparse = map(float, re.search(r"accuracy: dense ([\d.]+) %, DGC ([\d.]+) %", output).groups())
    assert min(dense, sparse) > 90.0
    assert float(re.search(r"bytes: ([\d.]+) times fewer", output).group(1)) > 5.0
