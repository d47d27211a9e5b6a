"""Parse and check the options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from arraybridge.errors import MemoryConversionError
from arraybridge.interface import registry


def parse_size(text: str) -> int:
    """Parse the value of ``--size``, such as ``"4MiB"``, and return the number of bytes.

    Units are B, K, KB, KiB, M, MB, MiB, G, GB and GiB. KB means 1000 bytes, K and KiB mean 1024.

    >>> parse_size("1.5 KiB")
    1536
    """
    match = re.fullmatch(r"([\d._e+]+) *(?:b|([kmg])(i?b)?)?", text.strip().lower())
    try:
        number, prefix, suffix = match.groups() if match else ("", None, None)
        unit: int = (1000 if suffix == "b" else 1024) ** ("kmg".index(prefix) + 1 if prefix else 0)
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not a size. Use a number of bytes, such as 4MiB.", param_hint="--size"
        ) from None
    if size <= 0:
        raise typer.BadParameter(
            f"{text!r} is not a size of at least one byte. Use a size such as 4MiB.", param_hint="--size"
        )
    return size


def parse_frameworks(text: str | None) -> list[str]:
    """Return the frameworks in ``--frameworks torch,jax``; by default all installed ones."""
    if text is None:
        return [name for name in registry.framework_names() if registry.is_installed(name)]
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not names:
        raise typer.BadParameter("The list is empty. Use names such as torch,jax.", param_hint="--frameworks")
    for name in names:
        try:
            if not registry.is_installed(registry.framework_name(name)):
                registry.framework(name)  # raises an error that names the extra to install
        except MemoryConversionError as error:
            raise typer.BadParameter(str(error), param_hint="--frameworks") from None
    return names


def check_writable(path: Path | None, option: str, *suffixes: str) -> None:
    """Raise an error if a file cannot be written, before the command does any work."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        allowed = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise typer.BadParameter(f"{path} must end in {allowed}.", param_hint=option)
    try:
        is_new = not path.exists() and not path.is_symlink()
        path.open("ab").close()
        if is_new:
            path.unlink()  # the command may fail before it writes the file
    except OSError as error:
        raise typer.BadParameter(f"Cannot write {path}: {error.strerror}.", param_hint=option) from None
