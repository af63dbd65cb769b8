"""An experiment as a document: checked before any weights load, explained as a plan, run into a folder that others can read.

>>> from murano import documents
>>> documents.validate({"model": {"key": None}, "roles": {}})[0].path
'roles'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from murano._lazy import lazy_exports

if TYPE_CHECKING:
    from murano.documents.document import Document as Document
    from murano.documents.document import load as load
    from murano.documents.document import validate as validate
    from murano.documents.errors import DocumentError as DocumentError
    from murano.documents.errors import Problem as Problem
    from murano.documents.runs import DocumentRun as DocumentRun
    from murano.documents.runs import open_run as open_run
    from murano.documents.schema import json_schema as json_schema
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "murano.documents.document": ["Document", "load", "validate"],
            "murano.documents.errors": ["DocumentError", "Problem"],
            "murano.documents.runs": ["DocumentRun", "open_run"],
            "murano.documents.schema": ["json_schema"],
        },
    )
