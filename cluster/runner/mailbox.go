package runner

import (
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
)

// maxMail bounds what has arrived from other nodes and was not looked at yet, bulk and the rest each, as
// ownership.Weight counts it. Beyond it messages are lost, as they may be anywhere on their way.
const maxMail = 64 << 20

// mailbox holds messages that the core has not received. Taking in the content of partitions takes long: it is
// overtaken by everything else, for which checks, leases and answers may wait.
type mailbox struct {
	light, bulk mail
}

// mail is a queue of messages that knows what they weigh.
type mail struct {
	fifo.Queue[ownership.Envelope]
	weight int
}

// add returns false when there is no room for the message.
func (m *mailbox) add(e *ownership.Envelope) bool {
	q := &m.light
	if ownership.Bulk(e.Message) {
		q = &m.bulk
	}
	w := ownership.Weight(e.Message)
	if q.weight+w > maxMail {
		return false
	}
	q.Push(*e)
	q.weight += w
	return true
}

// take appends the next messages to a list, most light ones and one of bulk at most.
func (m *mailbox) take(to []ownership.Envelope, most int) []ownership.Envelope {
	return m.bulk.take(m.light.take(to, most), 1)
}

func (m *mailbox) empty() bool { return m.light.Len()+m.bulk.Len() == 0 }

// take appends the oldest messages to a list.
func (q *mail) take(to []ownership.Envelope, most int) []ownership.Envelope {
	next := q.Items()[:min(q.Len(), most)]
	for i := range next {
		q.weight -= ownership.Weight(next[i].Message)
	}
	to = append(to, next...)
	q.Drop(len(next))
	return to
}
