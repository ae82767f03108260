"""The file that may have been meant by a path at which there is none."""

import difflib
import os
from pathlib import Path


def near_file(path: Path) -> str:
    """A file that may have been meant: of a like name, in a folder of a like name, or the only one of its kind. Empty: none."""
    if os.path.lexists(path):
        return ""
    folder = _near_folder(path.parent)
    if folder is None:
        return f"there is no directory {path.parent} either"
    # As it is to be written in place of the wanted one, from the folder that both have in common.
    there = os.path.relpath(folder, next(parent for parent in path.parents if parent.is_dir()))
    beside = {Path(name).stem: name for name in (file.name for file in folder.glob(f"*{path.suffix}"))}
    near = difflib.get_close_matches(path.stem, beside, n=1)  # an ending in common makes no names alike
    if near:
        return f"did you mean `{os.path.normpath(os.path.join(there, beside[near[0]]))}`, which is there?"
    if folder != path.parent:
        return f"there is no directory {path.parent} either; did you mean `{there}`?"
    return f"there is only `{next(iter(beside.values()))}`" if len(beside) == 1 else ""


def _near_folder(folder: Path) -> Path | None:
    """The folder, or the one that may have been meant."""
    if folder.is_dir() or folder == folder.parent:
        return folder
    around = _near_folder(folder.parent)
    if around is None:
        return None
    if (around / folder.name).is_dir():
        return around / folder.name
    near = difflib.get_close_matches(folder.name, [entry.name for entry in around.glob("*/")], n=1)
    return around / near[0] if near else None
