from trainjob.data.file_manifest import ContentManifest as ContentManifest
from trainjob.data.steps import (
    Exported as Exported,
    Initialized as Initialized,
    export as export,
    initialize as initialize,
)
from trainjob.data.transfer import copy as copy, read_manifest as read_manifest
