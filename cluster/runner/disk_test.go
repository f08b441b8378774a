package runner

import (
	"errors"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

// notedDisk notes the blocks that it is sent.
type notedDisk struct {
	mu     sync.Mutex
	blocks []*ownership.Block
	err    error
}

func (d *notedDisk) Send(b *ownership.Block) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.blocks = append(d.blocks, b)
}

func (d *notedDisk) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// TestDisk: blocks for the disk go there, answers wait for what it confirms, and the core is told when it has failed.
func TestDisk(t *testing.T) {
	d := &notedDisk{}
	k, c := newPuppet(t, func(cfg *Config) { cfg.Disk, cfg.Version = d, func(int) uint64 { return 9 } })
	block := &ownership.Block{Position: 1}
	c.do(func() { c.effects.Messages = []ownership.Envelope{{To: ownership.DiskNode(), Message: block}} })
	testkit.Eventually(t, "the disk has the block", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return slices.Contains(d.blocks, block)
	})
	awaits := func(ticket uint64, wantDegraded, wantOK bool) {
		t.Helper()
		degraded, ok := k.AwaitProgress(ended(), 3, ticket, false)
		expect.True(t, degraded == wantDegraded && ok == wantOK, "ticket %x: degraded %v, %v", ticket, degraded, ok)
	}
	known := func() bool {
		_, ok := k.AwaitProgress(ended(), 4, 1, false)
		return ok
	}
	c.confirm(ownership.Progress{Partition: 3, Version: 5, Saved: true})
	c.confirm(ownership.Progress{Partition: 4, Version: 1})
	testkit.Eventually(t, "it is known", known)
	awaits(5|ownership.Saved, false, true)
	awaits(6|ownership.Saved, false, false)
	awaits(5, false, false) // the backup has not confirmed it
	d.mu.Lock()
	d.err = errors.New("no space left")
	d.mu.Unlock()
	testkit.Eventually(t, "the core is told that the disk has failed", func() (told bool) {
		c.do(func() {
			told = slices.ContainsFunc(c.mail, func(e ownership.Envelope) bool {
				a, ok := e.Message.(*ownership.BlockAck)
				return ok && a.Lost && e.From == ownership.DiskNode()
			})
		})
		return told
	})
	c.confirm(ownership.Progress{Partition: 3, Version: math.MaxUint64, Saved: true, Unguarded: true})
	testkit.Eventually(t, "answers are given without it", func() bool {
		_, ok := k.AwaitProgress(ended(), 3, 9|ownership.Saved, false)
		return ok
	})
	awaits(9|ownership.Saved, true, true)
	// What is left of disk and backup confirms more: an answer that waited for both is degraded all the same.
	c.confirm(ownership.Progress{Partition: 3, Version: 10, Saved: true})
	c.confirm(ownership.Progress{Partition: 4, Version: 2})
	testkit.Eventually(t, "that is known", func() bool {
		_, ok := k.AwaitProgress(ended(), 4, 2, false)
		return ok
	})
	awaits(9|ownership.Saved, true, true)
	awaits(10|ownership.Saved, false, true)
}
