"""The page at /: a form for each model. Its files are in `page/`, and load nothing of other servers.

`page/components/` has what it shares with the demo page of the npm package, whose build takes the files from there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

_FOLDER = Path(__file__).resolve().parent.parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
        "media-src blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
@router.head("/")
async def show_page() -> Response:
    """Return the page."""
    return _response("index.html")


@router.get("/page/{name:path}")
async def show_file(name: str) -> Response:
    """Return a file of the page."""
    if name not in _files():
        raise HTTPException(404)
    return _response(name)


@cache
def _files() -> dict[str, bytes]:
    """Return name → content of the files of the page, which are read once: no request names a file to open."""
    files = (path for path in _FOLDER.rglob("*") if path.suffix in _KINDS)
    return {path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in files}


def _response(name: str) -> Response:
    kind = _KINDS[Path(name).suffix]
    return Response(_files()[name], media_type=kind, headers=_HEADERS)
