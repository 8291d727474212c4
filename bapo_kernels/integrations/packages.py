"""What an integration asks of the package that it is for: that it is there, in a version that was tested, and with its hooks in place."""

import importlib
import importlib.metadata
import re
import warnings
from types import ModuleType
from typing import Any, NamedTuple


class Package(NamedTuple):
    """A trainer's package, by the versions that the integration is tested with."""

    name: str  # of the distribution
    first: str
    last: str
    extra: str | None = None  # of bapo-kernels, that installs it

    def module(self, path: str) -> ModuleType:
        """Import `path`; ImportError that says what to install."""
        try:
            return importlib.import_module(path)
        except ImportError as error:
            how = f"pip install 'bapo-kernels[{self.extra}]'" if self.extra else f"install {self.name}"
            raise ImportError(
                f"{path} cannot be imported ({error}); this integration needs {self.name}: {how}"
            ) from error

    def hook(self, path: str, name: str) -> Any:
        """What `name` (dots go into attributes) is in module `path`. RuntimeError where it is no more: a loss must not go unused."""
        found: Any = self.module(path)
        for part in name.split("."):
            if not hasattr(found, part):
                raise RuntimeError(
                    f"{self.name} {self.version} has no {path}.{name}, where bapo_kernels hooks in; "
                    f"this integration was tested with {self.name} {self.first} to {self.last}"
                )
            found = getattr(found, part)
        return found

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.name)

    def check_version(self) -> None:
        """Warn, once for a package, where its version is not among the tested ones."""
        first, last, here = map(_numbers, (self.first, self.last, self.version))
        if (here < first or here[: len(last)] > last) and self.name not in _warned:
            _warned.add(self.name)
            tested = f"the versions that were tested: {self.first} to {self.last}"
            warnings.warn(f"bapo_kernels: {self.name} {self.version} is not among {tested}", stacklevel=3)


_warned: set[str] = set()  # names of packages


def _numbers(version: str) -> tuple[int, ...]:
    """The release: of "1.16.0rc1", (1, 16, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
