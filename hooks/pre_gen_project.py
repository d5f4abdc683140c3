"""Refuse, before any file is written, answers that would make a project that does not work.

A refusal is one line: what was answered, why it cannot be, and an answer that works. cookiecutter
prints a traceback of its own below it and removes the folder.

A slug that is not the name of one folder (`a/b`, `../x`, an absolute path) has to be caught
earlier: when this hook runs, cookiecutter has made all the folders on the way and would take back
only the last. The private variable in cookiecutter.json refuses those before any folder is made,
also with `--accept-hooks no`.

Jinja fills in the answers as JSON inside a string literal, so that no quote, backslash or emoji
in them can change what is Python here.
"""

import builtins
import json
import keyword
import re
import sys
import unicodedata

SLUG = json.loads({{cookiecutter.project_slug | tojson | tojson}})
TEXTS = {
    "project_name": json.loads({{cookiecutter.project_name | tojson | tojson}}),
    "description": json.loads({{cookiecutter.description | tojson | tojson}}),
    "author_name": json.loads({{cookiecutter.author_name | tojson | tojson}}),
}
DEFAULT_TEXTS = {"project_name": "My Project", "author_name": "Your Name"}  # these may not be blank

MAX_SLUG_LENGTH = 40

# The hook runs on the Python of cookiecutter; the project runs on 3.10 to 3.13. `test` is part of
# the standard library, yet not in sys.stdlib_module_names.
STDLIB = sys.stdlib_module_names | set(
    """
    test annotationlib compression distutils imp asynchat asyncore smtpd lib2to3 aifc audioop cgi
    cgitb chunk crypt imghdr mailcap msilib nis nntplib ossaudiodev pipes sndhdr spwd sunau
    telnetlib uu xdrlib sitecustomize usercustomize
    """.split()
)

# What the project imports, with all that this pulls in, and what projects like it often add. Both
# kinds of name count: a folder called like an import hides the library, and a project called like
# a distribution would depend on itself.
DEPENDENCIES = set(
    """
    torch functorch torchgen numpy hydra hydra_core omegaconf sklearn scikit_learn scipy joblib
    threadpoolctl pil pillow safetensors matplotlib mpl_toolkits pylab contourpy cycler fonttools
    kiwisolver pyparsing dateutil python_dateutil six rich markdown_it markdown_it_py mdurl
    pygments optuna alembic colorlog mako sqlalchemy greenlet tqdm yaml pyyaml antlr4
    antlr4_python3_runtime packaging filelock fsspec jinja2 markupsafe mpmath networkx sympy
    isympy typing_extensions setuptools pkg_resources pip wheel triton nvidia cuda cloudpickle
    narwhals tomli exceptiongroup

    pytest pluggy iniconfig py ruff pre_commit cfgv identify nodeenv virtualenv distlib
    platformdirs python_discovery coverage hypothesis mypy

    cookiecutter cruft slugify python_slugify binaryornot text_unidecode click arrow tzdata
    requests certifi charset_normalizer chardet idna urllib3

    wandb wandb_gql wandb_graphql wandb_watchdog pydantic pydantic_core annotated_types
    typing_inspection google protobuf opentelemetry sentry_sdk git gitpython gitdb smmap httpx
    httpcore h11 anyio sniffio psutil docker gql graphql

    fastapi starlette uvicorn multipart onnx onnxruntime onnxscript datasketch cleanlab submitit
    hydra_plugins pydevd_plugins ray timm torchvision torchaudio transformers tokenizers datasets
    accelerate peft huggingface_hub lightning pytorch_lightning torchmetrics tensorboard tensorflow
    keras jax flax pandas polars pyarrow xgboost lightgbm catboost shap cv2 imageio skimage
    albumentations einops seaborn plotly faiss mlflow evaluate numba cython nltk spacy gradio
    streamlit notebook jupyter ipython ipykernel
    """.split()
)

# Files and folders of the project, modules in its package, and folders that tools make beside
# them. Upper case is written small: some file systems do not tell LICENSE from license.
OWN_NAMES = set(
    """
    run serve test tests conftest configs config conf artifacts runs outputs multirun data
    preprocessing model task stages stage harness hooks waivers docs doc bench benchmarks build dist
    src lib bin include scripts examples notebooks env venv walk makefile license readme
    constraints pyproject setup
    """.split()
)

PORTS = {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
WINDOWS_DEVICES = PORTS | {"con", "prn", "aux", "nul"}


def problem_with_slug(slug):
    """Why `slug` cannot name the project's folder and package, or None."""
    if not slug:
        return "is empty."
    if slug in {".", ".."} or "/" in slug or "\\" in slug:
        return "is a path: the project is one folder inside the output folder."
    if strange := re.search(r"[^a-z0-9_]", slug, re.ASCII):
        if slug.isascii() and re.fullmatch(r"[A-Za-z0-9_]+", slug):
            return "has upper case letters, which some file systems do not tell from lower case."
        return f"has the character {strange.group()!a}; a-z, 0-9 and _ are possible."
    if len(slug) > MAX_SLUG_LENGTH:
        return f"has {len(slug)} characters; at most {MAX_SLUG_LENGTH} are possible."
    if slug[0].isdigit():
        return "begins with a digit, which no Python name does."
    if slug.startswith("_") or slug.endswith("_"):
        return "begins or ends with _, which no distribution name does."
    return problem_with_word(slug)


def problem_with_word(slug):
    """Why a well-formed slug is taken by somebody else, or None."""
    if keyword.iskeyword(slug) or keyword.issoftkeyword(slug) or slug in {"true", "false", "none"}:
        return "is a keyword of Python."
    if slug in STDLIB:
        return "is a module of Python's standard library, which it would hide."
    if slug in DEPENDENCIES:
        return "is the name of a dependency or of a library often added, which it would hide."
    if slug in OWN_NAMES:
        return "is the name of a file, folder or module that the project itself or its tools have."
    if slug in vars(builtins):
        return "is a built-in name of Python."
    if slug in WINDOWS_DEVICES:
        return "is a device name on Windows, where no folder can have it."
    return None


def suggest_slug(slug):
    """A slug close to the refused one that is not refused."""
    plain = unicodedata.normalize("NFKD", slug).encode("ascii", "ignore").decode().lower()
    plain = re.sub(r"[^a-z0-9]+", "_", plain)[: MAX_SLUG_LENGTH - 4].strip("_")
    candidates = (plain, f"{plain}_net", f"my_{plain}", "my_project")
    return next(name for name in candidates if problem_with_slug(name) is None)


def is_control(character):
    """Whether it would break a line, a TOML string or the UTF-8 encoding of a file."""
    return unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}


def problem_with_text(name, text):
    """Why a free text cannot be written into the project's files, or None."""
    if control := next(filter(is_control, text), None):
        return f"has the control character U+{ord(control):04X}: it has to be one plain line."
    if not text.strip() and name in DEFAULT_TEXTS:
        return "is blank."
    return None


def suggest_text(name, text):
    plain = "".join(" " if is_control(character) else character for character in text)
    return " ".join(plain.split()) or DEFAULT_TEXTS.get(name, "")


def refusals():
    """One line per answer that cannot be; the texts first, since the slug is made from one."""
    for name, text in TEXTS.items():
        if problem := problem_with_text(name, text):
            yield f"{name} {text!a} {problem} Use: {suggest_text(name, text)}"
    if problem := problem_with_slug(SLUG):
        yield f"project_slug {SLUG!a} {problem} Use: {suggest_slug(SLUG)}"


if __name__ == "__main__":
    found = list(refusals())
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)
