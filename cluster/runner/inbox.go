package runner

import (
	"sync"
	"sync/atomic"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
)

// Inbox is where others leave something for a Runner. It is made before the Runner, and before the others, which a
// Runner needs. What is left in it before there is a Runner stays there until then. Its methods are safe for concurrent
// use.
type Inbox struct {
	wake   fifo.Signal     // set when there may be something to do
	urgent []atomic.Uint64 // a bit for each partition
	idle   atomic.Bool     // the Runner sleeps longer than tickEvery, unless a change comes

	mu   sync.Mutex
	mail mailbox
	lost uint64 // messages
}

// NewInbox returns an empty Inbox, for a Runner of so many partitions.
func NewInbox(partitions int) *Inbox {
	return &Inbox{wake: fifo.NewSignal(), urgent: make([]atomic.Uint64, (partitions+63)/64)}
}

// Receive takes messages from another node; see replica.MessengerConfig. It never blocks: when there is too much to be
// looked at, messages are lost.
func (b *Inbox) Receive(list []ownership.Envelope) {
	b.mu.Lock()
	for i := range list {
		if !b.mail.add(&list[i]) {
			b.lost++
		}
	}
	b.mu.Unlock()
	b.wake.Set()
}

// Changed says that a partition has changes for a follower; see store.Config.Changed. It takes no lock.
func (b *Inbox) Changed() {
	if b.idle.Load() && b.idle.Swap(false) {
		b.wake.Set()
	}
}

// Urgent says that a partition has changes that an answer waits for; see store.Config.Urgent. It takes no lock.
func (b *Inbox) Urgent(p int) {
	bit := uint64(1) << (p % 64)
	if b.urgent[p/64].Or(bit)&bit == 0 {
		b.wake.Set()
	}
}
