package testkit

import (
	"net"
	"sync"
)

// Pipes is a listener that accepts the connections that are sent to Conns, such as ends of net.Pipe.
type Pipes struct {
	Conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// NewPipes returns a listener without connections.
func NewPipes() *Pipes { return &Pipes{Conns: make(chan net.Conn), closed: make(chan struct{})} }

// Accept implements net.Listener.
func (p *Pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.Conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It never fails.
func (p *Pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

// Addr implements net.Listener.
func (*Pipes) Addr() net.Addr { return &net.TCPAddr{} }
