"""Metadata of the package; the version is parsed as text, never imported."""

import os
import re
import runpy
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "torchmix" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None
REPOSITORY = os.environ.get("TORCHMIX_REPOSITORY", "").rstrip("/")
"""Where a browser reads the repository, such as https://github.com/OWNER/torchmix. Set it to build for an index."""


def index_page(readme: str) -> str:
    """The README for a package index, which has no other file of the repository.

    Links to files lead into the repository. Where it is not known, their text stays, and pictures are left out.
    """

    def link(found: re.Match[str]) -> str:
        is_picture, text, target = found[1] == "!", found[2], found[3]
        if target.startswith(("https://", "#")):
            return found[0]
        if not REPOSITORY:
            return "" if is_picture else text
        kind = "raw" if is_picture else "blob"
        return f"{found[1]}[{text}]({REPOSITORY}/{kind}/v{VERSION[1]}/{target})"

    return re.sub(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)", link, readme)


NATIVE: dict[str, Any] = runpy.run_path(str(HERE / "torchmix" / "native" / "build.py"))


class BuildNative(build_ext):
    """Builds the native library as `torchmix/native/build.py` does: it has no part of Python's, so nor has its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        try:
            NATIVE["build"](Path(self.get_ext_fullpath(ext.name)))
        except NATIVE["CannotBuild"] as error:
            if os.environ.get("TORCHMIX_NATIVE") == "1":
                raise SystemExit(f"TORCHMIX_NATIVE=1 requires the native library: {error}") from error
            raise CompileError(str(error)) from error  # the extension is optional: a warning


class PlatformWheel(bdist_wheel):
    """One wheel for a platform and all Pythons."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    name="torchmix-data",  # on PyPI, torchmix is another project; the import stays torchmix
    version=VERSION[1],
    description="Mixes hundreds of datasets, gives every GPU equal work, resumes at any number of GPUs",
    long_description=index_page((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={
        name: f"{REPOSITORY}/{path}"
        for name, path in {
            "Source": "",
            "Documentation": "tree/main/docs",
            "Changelog": "blob/main/CHANGELOG.md",
            "Issues": "issues",
        }.items()
        if REPOSITORY
    },
    keywords="pretraining dataloader megatron fsdp data-mixture sequence-packing parquet webdataset multimodal",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["torchmix", "torchmix.*"]),
    package_data={"torchmix": ["py.typed"], "torchmix.native": ["*.c", "*.h"], "torchmix.cli.report": ["page.*"]},
    ext_modules=[
        Extension(
            f"torchmix.native.{Path(NATIVE['LIBRARY']).stem}",
            [str(path.relative_to(HERE)) for path in NATIVE["sources"]()],
            depends=["torchmix/native/native.h", "torchmix/native/fold.h"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    install_requires=[
        "torch>=2.6",
        "torchdata>=0.11",
        "pyarrow>=17",
        "numpy>=1.26",
        "msgspec>=0.18",
        "PyYAML>=6",
        "tqdm>=4.64",
        "duckdb>=1.2",
        "pyzmq>=26",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "tokenizers>=0.20",
            "tiktoken>=0.8",
            "fsspec>=2024.2",
            # The S3 server of the tests: what moto[server] adds for other services is left out.
            "moto[s3]>=5",
            "flask>=2.2",
            "flask-cors",
            "Pillow>=10.2",
            "soundfile>=0.12",
            "soxr>=0.4",
            "av>=18",
            "shtab>=1.7",
            "matplotlib>=3.8",
            "jinja2>=3.1.6",
        ],
        "check": ["ruff", "mypy", "types-PyYAML", "types-tqdm"],
        "tokenizers": ["tokenizers>=0.20"],
        "tiktoken": ["tiktoken>=0.8"],
        "images": ["Pillow>=10.2"],
        "chat": ["jinja2>=3.1.6"],
        "video": ["av>=18"],
        "audio": ["soundfile>=0.12", "soxr>=0.4"],
        "report": ["matplotlib>=3.8"],
        "ray": ["ray>=2.40"],
        "hf": ["fsspec>=2024.2", "huggingface_hub>=0.24"],
        "completion": ["shtab>=1.7"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27"],
        "megatron": ["megatron-core>=0.16,<0.17"],
    },
    entry_points={"console_scripts": ["torchmix = torchmix.cli.start:start"]},
)
