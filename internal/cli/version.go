package cli

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// release and commit are set by the linker (-X) where a release or an image is built.
var release, commit string

// version is what the linker was told, otherwise the module's version when the binary was built from a tagged module, otherwise "devel".
func version() string {
	info, ok := debug.ReadBuildInfo()
	if release != "" || !ok || info.Main.Version == "(devel)" {
		return cmp.Or(release, "devel")
	}
	return cmp.Or(info.Main.Version, "devel")
}

// build names the version, the commit, the Go release and the platform.
func build() string {
	c := cmp.Or(commit, "unknown")
	if info, ok := debug.ReadBuildInfo(); ok && commit == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				c = s.Value
			}
		}
	}
	return fmt.Sprintf("%s (commit %.12s, %s, %s/%s)", version(), c, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
