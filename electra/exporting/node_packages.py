"""The JavaScript libraries of the page: onnxruntime-web and @huggingface/tokenizers, from an npm registry.

    python -m electra.exporting.node_packages

fetches them into the package, and a wheel that is built afterwards contains them. `electra export --to page` fetches
them, too, where they are missing.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from electra.errors import ConfigError, DataError
from electra.runfolder import PARTIAL, lock_file

VENDOR = Path(__file__).with_name("static") / "vendor"


@dataclass(frozen=True)
class NodePackage:
    """A pinned npm package and the files of it that the page needs."""

    name: str
    version: str
    integrity: str  # of its archive: base64 of its SHA-512
    files: tuple[str, ...]

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"


PACKAGES = (
    NodePackage(
        name="onnxruntime-web",
        version="1.30.0",
        integrity="q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        files=("dist/ort.wasm.min.mjs", "dist/ort-wasm-simd-threaded.mjs", "dist/ort-wasm-simd-threaded.wasm"),
    ),
    NodePackage(
        name="@huggingface/tokenizers",
        version="0.2.0",
        integrity="LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        files=("dist/tokenizers.min.mjs",),
    ),
)
FILES = tuple(Path(file).name for package in PACKAGES for file in package.files)


def has_node_packages(folder: Path = VENDOR) -> bool:
    return all((folder / name).is_file() for name in FILES)


def require_node_packages() -> Path:
    """The folder of the JavaScript libraries; they are fetched with npm if this installation has none."""
    if not has_node_packages():
        fetch_node_packages(VENDOR)
    return VENDOR


def fetch_node_packages(folder: Path) -> None:
    """Fetch the archives with npm, compare them with their checksums, and extract what is needed of them."""
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(
            f"the page needs {' and '.join(package.reference for package in PACKAGES)}, which this installation lacks, "
            "and npm, which fetches them, is missing: install Node.js (on Debian: apt-get install npm)"
        )
    with tempfile.TemporaryDirectory() as temporary:
        extracted = Path(temporary, "extracted")
        extracted.mkdir()
        for number, package in enumerate(PACKAGES):
            archive = Path(temporary, str(number))
            archive.mkdir()
            pack(npm, package, archive)
            [file] = archive.glob("*.tgz")
            extract(package, file, extracted)
        replace_folder(folder, extracted)


def replace_folder(folder: Path, extracted: Path) -> None:
    """Put the extracted libraries in place of a folder that is missing, incomplete or of other versions."""
    draft = folder.with_name(f".{folder.name}{PARTIAL}")
    with lock_file(folder, wait_seconds=60):
        if has_node_packages(folder):  # another process was faster, and may be reading them
            return
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(extracted, draft)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)


def pack(npm: str, package: NodePackage, folder: Path) -> None:
    """Download the archive of a package."""
    command = [npm, "pack", package.reference, "--pack-destination", str(folder), "--silent"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if ended.returncode:
        reason = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise DataError(f"npm cannot fetch {package.reference} ({reason[:300]}); is there a network?")


def extract(package: NodePackage, archive: Path, folder: Path) -> None:
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.integrity:
        raise DataError(f"npm fetched a changed archive of {package.reference}: its SHA-512 is {digest}")
    with tarfile.open(archive) as contents:
        for name in package.files:
            file = contents.extractfile(f"package/{name}")
            assert file is not None
            (folder / Path(name).name).write_bytes(file.read())


if __name__ == "__main__":
    require_node_packages()
