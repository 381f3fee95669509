"""The implementations of the ops, one op and one target a file: legend, kernel, launcher.

A module `<op>_<target>` holds one function per op, with the signature of the op's schema in
`selective_compile.ops`. It is imported when first used: importing the package needs neither Triton nor a C++
compiler.
"""
