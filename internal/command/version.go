package command

import "runtime/debug"

// release is set by the linker where the build knows what it builds and the source has no history: in an image.
//
//	go build -ldflags "-X github.com/weirlimit/weir/internal/command.release=v1.2.3" ./cmd/weir
var release string

// version is what the linker was told, otherwise the module's version when the binary was built from a tagged module,
// otherwise the commit, otherwise "devel".
func version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return "devel-" + s.Value[:12]
		}
	}
	return "devel"
}
