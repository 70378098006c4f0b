"""A library of CUDA sources, compiled by nvcc."""

load("@b12x_environment//:settings.bzl", "NVCC")
load("@rules_cc//cc:defs.bzl", "cc_library")

def cuda_library(name, srcs, hdrs, architectures, copts, nvccopts, deps):
    """Makes a C++ library of CUDA sources, compiled by nvcc, and of C++ sources.

    Args:
      name: the library's name.
      srcs: .cu and .cc files.
      hdrs: the headers that they and the users of the library include, from the root.
      architectures: compute capabilities, such as `90a`.
      copts: options of the C++ compiler, for the C++ sources.
      nvccopts: more options of nvcc.
      deps: C++ libraries that the users of the library need as well.
    """
    gencode = ["-gencode=arch=compute_%s,code=sm_%s" % (arch, arch) for arch in architectures]
    objects = []
    for src in [src for src in srcs if src.endswith(".cu")]:
        compiled = src[:-len(".cu")] + ".pic.o"
        objects.append(compiled)
        native.genrule(
            name = compiled.replace("/", "_").replace(".", "_"),
            srcs = [src] + hdrs,
            outs = [compiled],
            cmd = " ".join(
                [NVCC, "-std=c++17 -O3 -DNDEBUG -I. -Xcompiler=-fPIC,-fvisibility=hidden"] +
                nvccopts + gencode + ["-c $(location %s) -o $@" % src],
            ),
            message = "Compiling",
        )
    cc_library(
        name = name,
        srcs = objects + [src for src in srcs if not src.endswith(".cu")],
        hdrs = hdrs,
        copts = copts,
        linkstatic = True,
        deps = deps,
    )
