# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
#
# One image with all programs, for amd64 and arm64 (and for others that Debian calls as Go does, as s390x):
#
#   docker buildx build --platform linux/amd64,linux/arm64 --sbom=true --provenance=true -t kube-smcr .
#
# The compiler runs on the machine that builds and compiles for the others. Of
# the programs only node-agent is linked with C: with libibverbs, which loads the
# driver of the RNIC that it finds. Both are of the distribution that compiled it,
# and stand in /var/lib/dpkg/status.d, where scanners look.
# `go version -m` on a program lists the modules it was made of.
#
# The one image that this is built on. Releases are built on its digest, and say so
# in their provenance; renovate.json writes the digest here.
ARG GO_IMAGE=docker.io/library/golang:1.26-bookworm
FROM --platform=$BUILDPLATFORM ${GO_IMAGE} AS build
ARG TARGETOS TARGETARCH
# A C compiler and the headers for the target, and what node-agent needs of it
# when it runs.
RUN dpkg --add-architecture $TARGETARCH && apt-get update && \
    apt-get install -y --no-install-recommends crossbuild-essential-$TARGETARCH libibverbs-dev:$TARGETARCH && \
    mkdir /runtime /tmp/deb && cd /tmp/deb && \
    apt-get download libc6:$TARGETARCH libibverbs1:$TARGETARCH ibverbs-providers:$TARGETARCH libnl-3-200:$TARGETARCH libnl-route-3-200:$TARGETARCH && \
    mkdir -p /runtime/etc /runtime/var/lib/dpkg/status.d && cp -L /etc/os-release /runtime/etc/ && \
    for deb in *.deb; do dpkg-deb -x $deb /runtime && dpkg-deb -f $deb > /runtime/var/lib/dpkg/status.d/$(dpkg-deb -f $deb Package); done && \
    rm -rf /runtime/usr/lib/*/gconv /runtime/usr/bin /runtime/sbin /runtime/usr/sbin && \
    find /runtime/usr/share -type f ! -name copyright -delete
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
# The directory's name is the program's, but the CNI plugin's, which is what a
# CNI configuration calls it. The version comes from git.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/cache \
    set -eu; export GOCACHE=/cache GOOS=$TARGETOS GOARCH=$TARGETARCH; \
    git config --global --add safe.directory /src; \
    export CC=$(dpkg-architecture -a "$TARGETARCH" -q DEB_HOST_GNU_TYPE)-gcc; \
    for dir in cmd/*/; do \
      name=$(basename "$dir"); [ "$name" != cni-plugin ] || name=smcr-cni; \
      cgo=0; [ "$name" != node-agent ] || cgo=1; \
      CGO_ENABLED=$cgo go build -trimpath -ldflags='-s -w' -o "/out/usr/bin/$name" "./$dir"; \
    done; \
    mkdir -p /out/etc; mkdir -m 1777 /out/tmp; \
    printf '%s\n' root:x:0:0:root:/root:/sbin/nologin nobody:x:65534:65534:nobody:/:/sbin/nologin > /out/etc/passwd; \
    printf '%s\n' root:x:0: nogroup:x:65534: > /out/etc/group

FROM scratch
ARG VERSION=dev REVISION=unknown
LABEL org.opencontainers.image.title="kube-smcr" \
      org.opencontainers.image.description="SMC-R (RFC 7609) for unmodified TCP applications in pods" \
      org.opencontainers.image.source="https://github.com/smcr-io/kube-smcr" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /runtime/ /
COPY --from=build /out/ /
# The agent is root in its container, with few capabilities; the chart runs
# everything else as another user.
USER 0:0
ENTRYPOINT ["/usr/bin/node-agent"]
