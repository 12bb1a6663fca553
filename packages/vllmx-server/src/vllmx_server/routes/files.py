"""/v1/files."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from vllmx_core.bounds import MAX_LIFETIME_S
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.answers.kept import Deleted, FileList
from vllmx_server.hosts import check_origin
from vllmx_server.routes.pages import answer, check_query, newest_first, number, page
from vllmx_server.state import owner_of, state_of
from vllmx_server.store.upload import uploaded

PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


async def upload(request: Request) -> Response:
    """Keeps the file of a multipart body."""
    state, owner = state_of(request), owner_of(request)
    check_origin(request, state.config.allowed_origins)
    state.check_admission()
    files = state.storage.files
    async with uploaded(request, state.config, files, owner) as found:
        lifetime_s = _lifetime(found.fields)
        kept = files.new_file(
            owner, found.name or "", found.fields["purpose"], found.num_bytes, lifetime_s
        )
        await files.keep([(kept, found.path)])
    return answer(kept.shown())


def _lifetime(fields: dict[str, str]) -> int | None:
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequestError(f"unknown field {shown(name)}: remove it", param=name)
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        raise InvalidRequestError(
            f"purpose is {shown(purpose or '')}: use one of {', '.join(PURPOSES)}",
            param="purpose",
        )
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise InvalidRequestError(
            "expires_after[anchor] must be created_at", param="expires_after[anchor]"
        )
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10) or not (
        1 <= int(seconds) <= MAX_LIFETIME_S
    ):
        raise InvalidRequestError(
            f"expires_after[seconds] must be between 1 and {MAX_LIFETIME_S}, got {shown(seconds)}",
            param="expires_after[seconds]",
        )
    return int(seconds)


async def list_files(request: Request) -> Response:
    """The files of this key."""
    check_query(request, "purpose", "limit", "order", "after")
    query = request.query_params
    found, has_more = await state_of(request).storage.files.page(
        owner_of(request),
        query.get("purpose"),
        query.get("after"),
        number(request, "limit", 1, 10_000, 10_000),
        newest_first(request),
    )
    return page(FileList, [each.shown() for each in found], has_more)


async def retrieve(request: Request) -> Response:
    """Answers what is known of a file."""
    files = state_of(request).storage.files
    return answer((await files.get(owner_of(request), request.path_params["id"])).shown())


async def content(request: Request) -> Response:
    """The bytes of a file."""
    files = state_of(request).storage.files
    found = await files.get(owner_of(request), request.path_params["id"])
    return FileResponse(
        files.path(found.id), media_type="application/octet-stream", filename=found.name
    )


async def delete(request: Request) -> Response:
    """Forgets one, unless a batch needs it."""
    state = state_of(request)
    found = await state.storage.files.get(owner_of(request), request.path_params["id"])
    batch = state.batches.reader_of(found.id)
    if batch is not None:
        raise InvalidRequestError(
            f"file {found.id} is the input of batch {batch.id}, which is {batch.status}: cancel it"
            " first"
        )
    await state.storage.files.delete(found.id)
    return answer(Deleted(id=found.id, object="file"))
