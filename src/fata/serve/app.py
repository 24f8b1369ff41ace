"""The routes of the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect

import fata
from fata.serve import schemas
from fata.serve.access import Access
from fata.serve.decode import TENSORS, Array, decode_files, decode_tensor
from fata.serve.errors import ServiceError
from fata.serve.limits import NAME, check_name
from fata.serve.messages import Setup
from fata.serve.metrics import RequestMetrics
from fata.serve.middleware import failure
from fata.serve.remote import Remote

STREAM = "/v1/streams/{stream}"
PAGES = {"": "index.html", "docs": "docs.html"} | {n: n for n in ("page.js", "page.css", "docs.js")}
SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")  # in the package fastapi-offline
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
POLICY = "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
IMAGES = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "image": {"type": "array", "items": {"type": "string", "format": "binary"}}
                    },
                }
            },
            **{
                kind: {"schema": {"type": "string", "format": "binary"}}
                for kind in ("image/jpeg", "image/png", "image/webp", *TENSORS)
            },
        },
    }
}
STATE = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
T = TypeVar("T")
ANYBODY: dict[str, Any] = {"security": []}  # needs no token
SETTINGS = ", ".join(schemas.StreamChange.model_fields)
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": schemas.Failure} for code in (401, 403, 404, 409, 413, 422, 429, 503)
}


def create_app(service: Remote, metrics: RequestMetrics) -> FastAPI:
    """The application of a service.

    Args:
        service: is called.
        metrics: of the requests.
    """
    access = Access(service.setup.tokens)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.connected():
            yield

    app = FastAPI(
        title="fata",
        version=fata.__version__,
        description="Image classifiers that adapt to each stream while they predict.",
        lifespan=lifespan,
        docs_url=None,  # those of FastAPI load scripts from another host
        redoc_url=None,
        responses=ERRORS,
    )
    if access.needs_token:
        _describe_tokens(app)
    _handle_errors(app)
    _add_pages(app, service, access, metrics)
    _add_predictions(app, service, access, metrics)
    _add_streams(app, service, access)
    _add_management(app, service, access)
    return app


def _describe_tokens(app: FastAPI) -> None:
    """The description asks for a bearer token, so the page at /docs has a field for it."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
        return schema

    app.openapi = described  # type: ignore[method-assign]


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def _(_: Request, error: ServiceError) -> Response:
        return failure(error)

    @app.exception_handler(ClientDisconnect)
    async def _(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the metrics

    @app.exception_handler(Exception)
    async def _(_: Request, __: Exception) -> Response:  # logged where it is raised again
        return failure(ServiceError(500, "internal error."))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, MultiPartException) or error.status_code == 400:
            return failure(ServiceError(422, "the form is damaged, or has too many parts."))
        if error.status_code == 404 and request.url.path.startswith("/v1/streams/"):
            return failure(ServiceError(404, f"there is no such path: {NAME}"))
        return failure(ServiceError(error.status_code, str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        if first["type"] == "extra_forbidden":
            return failure(ServiceError(422, f"{where}: unknown; choose from {SETTINGS}."))
        if first["loc"] == ("body",) or first["type"] == "json_invalid":
            example = '{"frozen": true}'
            return failure(ServiceError(422, f"the body: give JSON with {SETTINGS}: {example}."))
        return failure(ServiceError(422, f"{where}: {first['msg']}."))


async def _authorization(request: Request) -> str | None:
    return request.headers.get("authorization")


Authorization = Annotated[str | None, Depends(_authorization)]


def _add_pages(app: FastAPI, service: Remote, access: Access, metrics: RequestMetrics) -> None:
    """The page, metrics and probes."""

    @app.get("/healthz", tags=["probes"], openapi_extra=ANYBODY)
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["probes"], openapi_extra=ANYBODY)
    async def readyz() -> dict[str, str]:
        """Predictions are possible."""
        if not await service.call("is_ready"):
            raise ServiceError(503, "the service is not ready.", 1)
        return {"status": "ok"}

    @app.get("/metrics", tags=["probes"])
    async def all_metrics(authorization: Authorization) -> Response:
        """Metrics for Prometheus."""
        access.check(authorization)
        content = await service.call("metrics_text") + metrics.text()
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    @app.get("/{name}", include_in_schema=False)
    async def page(name: str = "") -> Response:
        if name not in PAGES and name not in SWAGGER:
            raise ServiceError(404, "there is no such page.")
        folder = ("fastapi_offline", "static") if name in SWAGGER else ("fata.serve", "page")
        file = PAGES.get(name, name)
        content = (files(folder[0]) / folder[1] / file).read_bytes()
        kind, policy = KINDS[file.rpartition(".")[2]], {"Content-Security-Policy": POLICY}
        return Response(content, media_type=kind, headers=policy)


def _add_predictions(
    app: FastAPI, service: Remote, access: Access, metrics: RequestMetrics
) -> None:
    """Predict."""

    @app.post(
        f"{STREAM}/predict",
        response_model=schemas.Predictions,
        openapi_extra=IMAGES,
        tags=["predict"],
    )
    async def predict(
        stream: str,
        request: Request,
        authorization: Authorization,
        top: Annotated[int, Query(ge=1, le=100, description="Classes for each image.")] = 5,
    ) -> Response:
        """Predict images of a stream, and learn from them.

        The images are the parts `image` of a form, or one image as the body. A tensor of pixels is
        sent as `application/x-npy` or `application/x-safetensors` (named `images`): uint8, or
        float32 in [0, 1], of shape (images, 3, size, size).
        """
        access.check(authorization, stream)
        start = time.monotonic()
        check_name(stream)
        sent = request.state.held.release
        prediction = service.submit(stream, await _pixels(request, service.setup), sent)
        probabilities, outcome = await _while_connected(request, prediction)
        metrics.seconds.observe(time.monotonic() - start)
        predictions = _predictions(probabilities, top, service.setup.labels)
        return JSONResponse({"stream": stream, "predictions": predictions, **outcome})


def _add_streams(app: FastAPI, service: Remote, access: Access) -> None:
    """See what there is."""

    @app.get("/v1/streams", response_model=schemas.StreamList, tags=["streams"])
    async def streams(
        authorization: Authorization,
        search: Annotated[str, Query(max_length=128)] = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Response:
        """The streams whose name has `search` in it."""
        token = access.token(authorization)
        known = await service.call("names")
        names = [name for name in known if token.allows(name) and search in name]
        found = await service.call("summaries", names[:limit])
        return JSONResponse({"streams": found, "total": len(names)})

    @app.get(STREAM, response_model=schemas.Stream, tags=["streams"])
    async def describe(stream: str, authorization: Authorization) -> Any:
        """All that is known of a stream."""
        access.check(authorization, stream)
        return await service.call("describe", stream)

    @app.get(f"{STREAM}/history", response_model=schemas.Points, tags=["streams"])
    async def history(stream: str, authorization: Authorization) -> Any:
        """The latest batches of a stream since the server started."""
        access.check(authorization, stream)
        points, labels = await service.call("history", stream), service.setup.labels
        shown = {label for point in points for label in point["classes"]} if labels else ()
        return {"points": points, "names": {label: labels[int(label)] for label in shown}}

    @app.get(f"{STREAM}/images", response_model=schemas.LatestImages, tags=["streams"])
    async def images(stream: str, authorization: Authorization) -> Any:
        """The latest images of a stream, if the server keeps them."""
        access.check(authorization, stream)
        labels = service.setup.labels
        latest = await service.call("latest_images", stream)
        return {
            "images": [{**one, "name": labels[one["label"]] if labels else None} for one in latest]
        }


def _add_management(app: FastAPI, service: Remote, access: Access) -> None:
    """Create, change and delete streams."""

    @app.put(STREAM, response_model=schemas.Stream, tags=["streams"])
    async def configure(
        stream: str, change: schemas.StreamChange, authorization: Authorization
    ) -> Any:
        """Create a stream, or change what is set for it.

        Another method restarts the stream from the source weights.
        """
        access.check(authorization, stream)
        given = change.model_dump(exclude_unset=True)
        if given.get("frozen", True) is None:
            raise ServiceError(422, "frozen: must be true or false.")
        await service.call("configure", stream, **given)
        return await service.call("describe", stream)

    @app.delete(STREAM, status_code=204, tags=["streams"])
    async def delete(stream: str, authorization: Authorization) -> None:
        """Forget a stream and its state."""
        access.check(authorization, stream)
        await service.call("delete", stream)

    @app.post(f"{STREAM}/reset", status_code=204, tags=["streams"])
    async def reset(stream: str, authorization: Authorization) -> None:
        """Restart a stream from the source weights."""
        access.check(authorization, stream)
        await service.call("reset", stream)

    @app.post(f"{STREAM}/freeze", status_code=204, tags=["streams"])
    async def freeze(stream: str, authorization: Authorization) -> None:
        """Predict without learning from now on."""
        access.check(authorization, stream)
        await service.call("freeze", stream, True)

    @app.post(f"{STREAM}/unfreeze", status_code=204, tags=["streams"])
    async def unfreeze(stream: str, authorization: Authorization) -> None:
        """Learn again."""
        access.check(authorization, stream)
        await service.call("freeze", stream, False)

    @app.get(f"{STREAM}/state", tags=["streams"], response_class=Response)
    async def download(stream: str, authorization: Authorization) -> Response:
        """The state of a stream: a safetensors file, as `adapter.load` takes it."""
        access.check(authorization, stream)
        content = await service.call("download", stream)
        named = {"Content-Disposition": f'attachment; filename="{stream}.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=named)

    @app.put(f"{STREAM}/state", status_code=204, openapi_extra=STATE, tags=["streams"])
    async def upload(stream: str, request: Request, authorization: Authorization) -> None:
        """Continue a stream from a state of the same model and method."""
        access.check(authorization, stream)
        await service.call("upload", stream, data=await request.body())


async def _pixels(request: Request, setup: Setup) -> Array:
    """The images of a request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    given = setup.view, setup.limits
    if kind in TENSORS:
        return decode_tensor(kind, await _body(request), *given)
    if kind == "multipart/form-data":
        async with request.form(
            max_files=setup.limits.images + 1,
            max_fields=setup.limits.images + 1,
            max_part_size=setup.limits.body,
        ) as form:
            bodies = [await _file(part) for part in form.getlist("image")]
        if not bodies:
            raise ServiceError(422, "no image: name the part 'image'.")
    elif kind.startswith("image/"):
        bodies = [bytes(await _body(request))]
    else:
        raise ServiceError(
            415, "give a form with parts 'image', one JPEG, PNG or WebP, a .npy or safetensors."
        )
    return await asyncio.to_thread(decode_files, bodies, *given)


async def _body(request: Request) -> bytearray:
    """The body, which the request does not keep."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return body


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client goes away."""
    working, gone = asyncio.create_task(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _file(part: UploadFile | str) -> bytes:
    """The content of a part of a form, which must be a file."""
    if isinstance(part, str):
        raise ServiceError(422, "the part 'image' is text: send a file, as -F image=@frame.jpg.")
    return await part.read()


def _predictions(
    probabilities: Array, top: int, labels: tuple[str, ...]
) -> list[dict[str, list[dict[str, Any]]]]:
    """The most probable classes of each row."""
    top = min(top, probabilities.shape[1])
    some = np.argpartition(-probabilities, top - 1, 1)[:, :top]
    order = np.argsort(-np.take_along_axis(probabilities, some, 1), 1, kind="stable")
    classes = np.take_along_axis(some, order, 1)
    values = np.take_along_axis(probabilities, classes, 1)
    return [
        {
            "top": [
                {"label": c, "name": labels[c] if labels else None, "probability": p}
                for c, p in zip(of, with_, strict=True)
            ]
        }
        for of, with_ in zip(classes.tolist(), values.tolist(), strict=True)
    ]
