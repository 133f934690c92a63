"""The models of our families, for SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang then imports no other unless one is asked for.

It takes them from `EntryClass` of each module here. Without this it imports some 200 modules, one after the other.
"""
