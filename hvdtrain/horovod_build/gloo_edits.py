"""What is changed in Horovod's source so that Gloo connects over the job's network interface, and over no other."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_CONTEXT = "horovod/common/gloo/gloo_context.cc"

GLOO: tuple[Edit, ...] = (
    Edit(
        "horovod/common/gloo/gloo_context.h",
        "  std::string gloo_iface_;\n",
        "  std::string gloo_iface_;\n"
        "  std::string gloo_address_;  // where to listen if no interface is named; empty: at this host's own name\n",
        "for the edits after",
    ),
    Edit(
        _CONTEXT,
        "  device_attr.iface = gloo_iface_;\n\n  device_attr.ai_family = AF_UNSPEC;\n",
        "  device_attr.iface = gloo_iface_;\n"
        "  // Ranks of one host need no more than loopback, nor does one alone. An elastic job may get other hosts.\n"
        "  if (!GetBoolEnvOrDefault(HOROVOD_ELASTIC, false) &&\n"
        "      GetIntEnvOrDefault(HOROVOD_SIZE, 1) == GetIntEnvOrDefault(HOROVOD_LOCAL_SIZE, 1)) {\n"
        '    gloo_address_ = "127.0.0.1";\n'
        "  }\n"
        "  device_attr.hostname = gloo_address_;\n\n"
        "  device_attr.ai_family = AF_UNSPEC;\n",
        "a process alone over Gloo listened at the address of its host's name, and crashed where that has none",
    ),
    Edit(
        _CONTEXT,
        "  attr device_attr;\n"
        "  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n"
        "  gloo_address_ = global_context.gloo_address_;\n"
        "  attr device_attr;\n"
        "  device_attr.iface = gloo_iface_;\n"
        "  device_attr.hostname = gloo_address_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
        "ranks listened and sent at the address of their host's name, not over the interface of the job",
    ),
    Edit(
        "third_party/gloo/gloo/transport/tcp/device.cc",
        "  GLOO_ENFORCE_NE(rv, -1);\n  struct addrinfo* rp;\n",
        "  if (rv != 0) {\n"
        "    throw ::gloo::IoException(\n"
        '        "this host\'s name, " + attr.hostname + ", has no address (" + gai_strerror(rv) +\n'
        '        "): set HOROVOD_GLOO_IFACE to the network interface that leads to the other hosts, e.g. eth0, or "\n'
        '        "add the name to /etc/hosts");\n'
        "  }\n"
        "  struct addrinfo* rp;\n",
        "a host name without an address ended in a crash: only one of a dozen errors was looked for",
    ),
)
