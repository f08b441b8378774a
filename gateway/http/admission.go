package httpapi

import (
	"context"
	"io"

	"github.com/weirlimit/weir/limit"
)

// What requests take while they are carried out, in bytes, about.
const (
	// perByte is for each byte of a body: it is read into a buffer that doubles, and its texts are copied.
	perByte = 4
	// perCheck is a check of a batch with its operation, its result and its answer, and leastCheck the fewest bytes it is sent as.
	perCheck, leastCheck = 3 << 9, 24
	// lightRequest is what a request may take that is not counted: requests are bounded by their number.
	lightRequest = 16 << 10
)

// countedBody counts the bytes of a body as they come in.
type countedBody struct {
	api  *api
	s    *scratch
	from io.Reader
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.from.Read(p)
	b.api.keep(b.s, 2*int64(n)) // the buffer doubles
	return n, err
}

// keep counts bytes of a request that waits for the network.
func (a *api) keep(s *scratch, bytes int64) {
	if a.Buffers == nil || bytes == 0 {
		return
	}
	s.held += bytes
	if bytes > 0 {
		a.Buffers.Hold(bytes)
	} else {
		a.Buffers.Release(-bytes)
	}
}

// admit waits until there is room to carry out a request whose body has been read.
func (a *api) admit(ctx context.Context, s *scratch) error {
	size := int64(s.in.Len())
	return a.admitBytes(ctx, s, size*perByte+min(size/leastCheck, limit.MaxBatch)*perCheck)
}

// admitBytes is admit for a request that needs so many bytes.
func (a *api) admitBytes(ctx context.Context, s *scratch, need int64) error {
	if need <= lightRequest {
		return nil
	}
	taken, err := a.Requests.Enter(ctx, need)
	s.taken = taken
	a.keep(s, -s.held) // need has it
	return err
}

// answering is called when all that is left of a request is to write its answer: it makes way for others, and what it keeps
// counts as waiting for the network: that many bytes.
func (a *api) answering(s *scratch, kept int64) {
	a.keep(s, kept)
	a.Requests.Leave(s.taken)
	s.taken = 0
}
