package weir

import (
	"testing"

	"github.com/weirlimit/weir/internal/memory"
)

// TestMemoryByDefault: a node takes a quarter of what the process may use.
func TestMemoryByDefault(t *testing.T) {
	cfg := Config{Name: "node"}
	out, err := cfg.node()
	if all := memory.Own().Usable; err != nil || out.Memory.Usable != all/4 {
		t.Errorf("%d of %d bytes, %v", out.Memory.Usable, all, err)
	}
}
