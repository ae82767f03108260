"""Which columns of files are a model's inputs, and which go into the output."""

from collections.abc import Iterable, Mapping, Sequence

from backends.base import ModelSpec
from gateway.errors import ConfigError, instead
from gateway.transform.rows import Row
from gateway.transform.writing import NUMBER


class Columns:
    """Of a job."""

    def __init__(self, spec: ModelSpec, called: Mapping[str, str], keep: Sequence[str] | None) -> None:
        """called: what a column is called in the files, by input. keep: what goes into the output, an input by either name;
        None: what is no input. Raises: ConfigError, if `called` has an input that the model has not.
        """
        self._inputs = spec.input_by_name
        self._needed = [tensor.name for tensor in spec.inputs if not tensor.optional]
        self._called = called
        inputs = {column: name for name, column in called.items()} | {name: name for name in called}
        self._keep = None if keep is None else {name: inputs.get(name, name) for name in keep}  # what a renamed row calls it
        self._taken = {NUMBER, *spec.output_by_name}
        for name, column in called.items():
            if name not in self._inputs:
                others = instead(name, self._inputs, "its inputs")
                raise ConfigError(f"--column: {name}={column}: the model has no input '{name}'{others}")

    @property
    def wanted(self) -> set[str] | None:
        """Columns of the files that are looked at; None: all."""
        return None if self._keep is None else {*self._inputs, *self._called.values(), *self._keep}

    def rename(self, row: Row) -> None:
        """Give inputs their names."""
        found = {name: row[column] for name, column in self._called.items() if column in row}
        for name in (*self._called, *self._called.values()):  # an input whose column is missing is not its namesake
            row.pop(name, None)
        row.update(found)

    def kept(self, row: Row) -> Row:
        """What goes into the output, of a row that is renamed."""
        if self._keep is None:
            return {name: value for name, value in row.items() if name not in self._inputs}
        return {name: row[here] for name, here in self._keep.items() if here in row}

    def clash(self, row: Row) -> str:
        """Why a renamed row cannot go into the output: the place of a column there is another's. Empty: it can."""
        clashing = () if self._taken.isdisjoint(row) else self._taken & self.kept(row).keys()
        return f"a column is called as one of the output ({', '.join(sorted(clashing))}): --keep others" if clashing else ""

    def check_file(self, names: Sequence[str], source: str) -> None:
        """Whether a file whose columns are these has what is asked for. Raises: ConfigError."""
        for name, column in self._called.items():
            if column not in names:
                raise ConfigError(f"--column: {name}={column}: {source} has no '{column}'{_instead(column, names)}")
        row = dict.fromkeys(names)
        self.rename(row)
        for name, here in (self._keep or {}).items():
            if here not in row:
                raise ConfigError(f"--keep: {name}: {source} has no '{name}'{_instead(name, list(row))}")
        self._check(row, source, "it")

    def check_row(self, row: Row, source: str) -> None:
        """The same of a file that does not say its columns, by its first row, renamed. Raises: ConfigError."""
        self._check(row, source, "its first row")

    def _check(self, row: Row, source: str, what: str) -> None:
        missing = [name for name in self._needed if name not in row]
        if missing:
            raise ConfigError(
                f"{source}: {what} has {_listed(row) or 'nothing'}, and the model needs {_listed(missing)}: rename what is "
                "meant, as by --column INPUT=COLUMN"
            )
        if why := self.clash(row):
            raise ConfigError(f"{source}: {why}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _instead(name: str, names: Sequence[str]) -> str:
    return instead(name, names, "its columns")
