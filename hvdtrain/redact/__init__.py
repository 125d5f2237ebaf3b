"""Leave out of what is shown or kept whatever is secret, or says who and where somebody is.

`names` knows which names are a secret's, `secrets` hides values, `machines` hides people and hosts. Whoever writes a
file, a log or a report calls one of the functions here.
"""

from hvdtrain.redact.machines import Scrubber as Scrubber
from hvdtrain.redact.machines import interface as interface
from hvdtrain.redact.names import is_secret as is_secret
from hvdtrain.redact.secrets import HIDDEN as HIDDEN
from hvdtrain.redact.secrets import document as document
from hvdtrain.redact.secrets import strings as strings
from hvdtrain.redact.secrets import text as text
from hvdtrain.redact.secrets import variables as variables
from hvdtrain.redact.secrets import words as words

__all__ = ["HIDDEN", "Scrubber", "document", "interface", "is_secret", "strings", "text", "variables", "words"]
