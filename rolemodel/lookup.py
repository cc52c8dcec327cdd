"""Finds what a name in a TOML stands for: the module of a task, a function, or the script of a role.

A module is looked for next to the TOML first, then among our own files, then among the installed modules. A wrong name
should end a run at once, so the checks read files without importing them: importing torch takes seconds, and starting a
server takes a minute."""

import ast
import importlib
import os
import sys
import zlib
from difflib import get_close_matches
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from rolemodel.role import ConfigError

ROOT = Path(__file__).resolve().parent.parent
TASKS = ROOT / "configs"
LIBRARY = ROOT / "rolemodel"
BESIDE = []  # the directories of the TOMLs that this process has loaded
# {role: its file}. A worker of vLLM loads no TOML, so the launcher tells it by a variable.
SCRIPTS = {"orchestrator": ROOT / "orchestrator.py"}
SCRIPTS["trainer"] = Path(os.environ.get("ROLEMODEL_TRAINER", ROOT / "trainer.py"))
ANYTHING = "*"  # stands for the names of a file if they cannot be known from its text


def nearest(word, words):
    """The end of an error message: the words that may have been meant, or else all words."""
    words = sorted(words)
    near = get_close_matches(word, words, 3, 0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there is {', '.join(map(repr, words[:12])) or 'nothing'}{', ...' * (len(words) > 12)}"


# --- the scripts of the roles -----------------------------------------------------------------------------------------


class RoleFinder:
    """Makes `import trainer` import the file that trainer.script names, wherever the import is: in a loss, an order or
    a tool."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in SCRIPTS:
            return None
        sys.path.append(str(SCRIPTS[name].parent))  # a copy may import what is next to it
        return spec_from_file_location(name, SCRIPTS[name])


sys.meta_path.insert(0, RoleFinder)


def find_script(role, name, origin):
    """Finds the file that `<role>.script` names, next to the TOML or in the repository. "" means the file that runs as
    this role in this process, or else our own. From now on, `import <role>` means this file. Returns the file, and the
    name by which config.toml can find it again."""
    ours = ROOT / f"{role}.py"
    folders = [origin.parent, ROOT]
    module = sys.modules.get(role)
    if not name and module is sys.modules["__main__"]:
        name = os.path.abspath(module.__file__)
    path = next((file for folder in folders if (file := (folder / name).resolve()).is_file()), None) if name else ours
    if not path:
        files = {file.name for folder in folders for file in folder.glob("*.py")}
        raise ConfigError(f"key '{role}.script' = {name!r}: not in {folders[0]} or {ROOT}; {nearest(name, files)}")
    loaded = getattr(module, "__file__", None) or path
    if not path.samefile(loaded):
        raise ConfigError(f"key '{role}.script' = {name!r}: but this process runs {loaded}")
    SCRIPTS[role] = path
    if path == ours:
        return path, ""
    if path.is_relative_to(folders[0]):
        return path, str(path.relative_to(folders[0]))
    is_found_again = path.is_relative_to(ROOT) and not (folders[0] / path.relative_to(ROOT)).exists()
    return path, str(path.relative_to(ROOT) if is_found_again else path)


# --- modules ----------------------------------------------------------------------------------------------------------


def installed(name):
    """The file in which Python itself would find a module, or None."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # a part of a dotted name is missing
        return None
    return Path(spec.origin).resolve() if spec and spec.has_location else None  # a plain folder has no location


def find_modules(name, ours):
    """The files of all modules with this name: next to the TOML, in the folder `ours`, and installed. The first one
    counts."""
    if name in SCRIPTS:
        return [SCRIPTS[name]]
    files = [installed(name)]
    for folder in (ours, *BESIDE):
        path = folder.joinpath(*name.split("."))
        files += [file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()]
    return list(dict.fromkeys(filter(None, reversed(files))))


def import_file(name, path):
    """Imports a file as a module. If Python would find another file by this name, as for a task that is called `code`,
    the module gets a different name."""
    if path.parent == LIBRARY:
        return importlib.import_module(f"rolemodel.{name}")
    if name in SCRIPTS or installed(name) == path:
        return importlib.import_module(name)
    alias = f"own_{name}_{zlib.crc32(bytes(path)):08x}"
    if alias not in sys.modules:
        spec = spec_from_file_location(alias, path)
        sys.modules[alias] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]


def names_in(path):
    """{name: the node of the syntax tree that defines it, or None if it is imported} for the top level of a file."""
    try:
        nodes = ast.parse(path.read_bytes(), path).body
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from None
    names = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    names[target.id] = node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0]: None for alias in node.names}
        else:  # an if, or a try
            nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
    return names | ({ANYTHING: None} if "__getattr__" in names else {})


def check_arguments(key, given, node, names, num_own):
    """Raises ConfigError if a function or class does not take one of the given keyword arguments. Its first num_own
    parameters are not for the user."""
    while isinstance(node, ast.ClassDef):
        init = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        bases = [names.get(base.id) for base in node.bases if isinstance(base, ast.Name)]
        node = next(iter(init + bases), None)
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.kwarg:
        return  # what it takes cannot be known, or it takes anything
    known = [arg.arg for arg in [*node.args.posonlyargs, *node.args.args][num_own:] + node.args.kwonlyargs]
    for name in given:
        if name not in known:
            raise ConfigError(f"key '{key}.{name}': is not an argument; {nearest(name, known)}")


# --- functions and tasks ----------------------------------------------------------------------------------------------


def files_having(what, module, function, ours):
    """Those files of find_modules that define this function. what: the key and its value, for errors."""
    files = find_modules(module, ours)
    if not files:
        stems = {file.stem for folder in (ours, *BESIDE) for file in folder.glob("*.py")}
        where = f"next to the TOML, in {ours.name}/ or installed"
        raise ConfigError(f"{what}: there is no module {module!r} {where}; {nearest(module, stems)}")
    having = [file for file in files if {function, ANYTHING} & names_in(file).keys()]
    if not having:
        public = {word for word in names_in(files[0]) if not word.startswith("_")}
        raise ConfigError(f"{what}: {files[0]} has no {function!r}; {nearest(function, public)}")
    return having


def find_file_of(key, name):
    """The file of the module in "module:function". A user's module cannot replace one of our functions."""
    module, _, function = name.partition(":")
    file, *others = files_having(f"key {key!r} = {name!r}", module, function, LIBRARY)
    if file.parent != LIBRARY and any(other.parent == LIBRARY for other in others):
        raise ConfigError(f"key {key!r} = {name!r}: both {file} and rolemodel/{module}.py have it: rename yours")
    return file


def find_function(name, table=()):
    """Returns the function that a key names: an entry of `table`, or "module:function"."""
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(f"{name!r}: not one of ours, nor module:function; {nearest(name, table)}")
    module, _, function = name.partition(":")
    return getattr(import_file(module, find_file_of("module:function", name)), function)


def check_function(key, name, script=None, table="", args=None, num_own=0):
    """Raises ConfigError unless `name` is a key of the dict `table` in the file `script`, or "module:function", and the
    function takes these keyword arguments."""
    if ":" in name:
        names = names_in(find_file_of(key, name))
        node = names.get(name.partition(":")[2])
    else:
        names = names_in(Path(script))
        found = names.get(table)
        if not isinstance(found, ast.Dict):
            return  # a changed copy builds its table in another way
        entries = {getattr(word, "value", ANYTHING): value for word, value in zip(found.keys, found.values)}
        if name not in entries:
            raise ConfigError(f"key {key!r} = {name!r}: not one of ours, nor module:function; {nearest(name, entries)}")
        node = names.get(getattr(entries[name], "id", ""))
    check_arguments(f"{key}_args", args or {}, node, names, num_own)


def find_task(id):
    """The name and the file of a task's module. For "org/my-task" it is my_task.py or my_task/, with a
    load_environment."""
    name = id.rsplit("/", 1)[-1].replace("-", "_")
    return name, files_having(f"key 'env.id' = {id!r}", name, "load_environment", TASKS)[0]


def check_path(key, name):
    """Raises ConfigError unless the file or directory exists. Relative paths start in the repository."""
    path = ROOT / name
    if not path.exists():
        others = [other.name for other in path.parent.glob("[!.]*")]
        raise ConfigError(f"key {key!r} = {name!r}: there is no {path}; {nearest(path.name, others)}")


def check_names(cfg):
    """Raises ConfigError unless everything that the configuration names exists, and takes the arguments that the
    configuration gives it."""
    t, o = cfg.trainer, cfg.orchestrator
    check_function("trainer.loss", t.loss, t.script, "LOSSES", t.loss_args, 3)
    check_function("orchestrator.advantage", o.advantage, o.script, "ADVANTAGES")
    if t.optimizer:
        check_function("trainer.optimizer", t.optimizer)
    if o.order:
        check_function("orchestrator.order", o.order, args=o.order_args, num_own=5)
    for env in cfg.env:
        _, file = find_task(env.id)
        names = names_in(file)
        check_arguments("env.args", env.args, names.get("load_environment"), names, 0)
    tracker = cfg.run.tracker
    if tracker and not find_spec(tracker):
        raise ConfigError(f"key 'tracker' = {tracker!r}: the package is not installed: pip install {tracker}")
    for key in ("prepare", "chat_template"):
        if cfg.flat[key]:
            check_path(key, cfg.flat[key])
    if cfg.run.model.startswith((".", "/")) and not cfg.run.prepare:
        check_path("model", cfg.run.model)
