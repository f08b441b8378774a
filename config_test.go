package weir

import (
	"testing"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/test/expect"
)

// TestMemoryByDefault: a node takes a quarter of what the process may use.
func TestMemoryByDefault(t *testing.T) {
	cfg := Config{Name: "node"}
	out, err := cfg.node()
	all := admission.OwnBudget().Usable
	expect.True(t, err == nil && out.Memory.Usable == all/4, "%d of %d bytes, %v", out.Memory.Usable, all, err)
}
